"""A step watched at points in its order, for steps with too many ops to trace."""
