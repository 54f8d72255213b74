"""A script that trains, run up to its training loop, whose body becomes the step of a run: no factory is written."""
