"""Where a setting comes from: command line, environment, file, default."""
