"""Every strategy from inside Lightning, Accelerate and Hugging Face's Trainer; each file imports its framework."""
