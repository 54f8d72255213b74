"""The Hugging Face Trainer, its subclasses (TRL), and models of any kind in it (PEFT)."""
