"""Files of LoRA adapters on the machine of a worker."""
