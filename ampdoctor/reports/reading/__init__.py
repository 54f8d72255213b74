"""Reports read back, checked and merged."""
