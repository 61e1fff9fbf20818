"""Model families: what their checkpoints call things, sizes from config.json, which modules LoRA adapts. No torch."""
