"""The parts of any training loop, ours or not: names, phases, backwards, scaler events, and the seam of probes."""
