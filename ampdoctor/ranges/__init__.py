"""The range profile of a run: histograms, curves by step and loss scale, and their form in a file."""
