"""What a generator remembers of single examples that it was trained on."""
