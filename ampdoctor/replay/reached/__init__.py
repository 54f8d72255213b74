"""What a run's functions reach beside its parts: variables, containers, objects, tensors; found, kept and put back."""
