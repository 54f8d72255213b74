"""The log of a watched training, `log.jsonl`: its lines as records, as text, and read back."""
