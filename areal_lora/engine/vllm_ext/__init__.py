"""The rollout process: vLLM with our server around it (``server``) and our code in its workers (``worker``)."""
