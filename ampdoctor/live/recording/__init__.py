"""Records a step of a user's loop, so that it can be run again."""
