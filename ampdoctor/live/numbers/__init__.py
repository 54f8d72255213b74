"""The numbers of a live step, taken without waiting for the device: norms, scale, samples, updates."""
