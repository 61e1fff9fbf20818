"""HTTP headers of this package's own."""

LEAVING_HEADER = "X-Areal-Leaving"
"""Of a 503 of a rollout server's data plane: the server leaves, and has not answered."""
