"""File formats: each file here reads one kind of file, inertly and bounded, and knows nothing of training."""
