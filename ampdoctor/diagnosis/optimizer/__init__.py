"""Rules on an optimizer's saved state."""
