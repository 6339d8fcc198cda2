"""What is known of documents beside their passages, and which of them fit what is asked for."""
