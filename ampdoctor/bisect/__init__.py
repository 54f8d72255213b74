"""Searches that run a trial at a time: the first bad place in an order, the smallest set that cures. Free of torch."""
