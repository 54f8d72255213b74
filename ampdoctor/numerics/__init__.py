"""Number formats, the histogram of magnitudes, the cheap non-finite check, and distances of tensors."""
