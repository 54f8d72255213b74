"""What users put inside their own training loop."""
