"""What any training loop has, ours or not: names, phases, backwards, scaler events, and the seam of probes."""
