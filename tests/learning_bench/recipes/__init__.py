"""What is compared, and how it learns."""
