"""The range profile of a run: histograms, curves by step and loss scale, and how they lie in a file."""
