"""What a live step shows in numbers, taken without waiting for the device: norms, scale, samples, updates."""
