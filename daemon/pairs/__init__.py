"""Questions that a site makes of its own documents."""
