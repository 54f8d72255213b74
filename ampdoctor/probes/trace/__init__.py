"""Every op of one step: where non-finite values are born, and which way they take."""
