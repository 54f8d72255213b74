"""Runs a script up to its training loop, whose body becomes the step of a run, so that no factory is needed."""
