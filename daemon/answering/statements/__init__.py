"""What a language model wrote, taken apart: plain text, quantities, what supports a statement."""
