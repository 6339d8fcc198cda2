"""The generator: what a site's language model learns from, and how."""
