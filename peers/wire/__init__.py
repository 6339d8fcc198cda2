"""What crosses between sites, and its bounds."""
