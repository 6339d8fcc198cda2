"""What of a model is a site's own."""
