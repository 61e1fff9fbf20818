"""Configuration: pydantic models, YAML loading with overlays, start-up guardrails."""
