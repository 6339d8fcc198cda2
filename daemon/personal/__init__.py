"""What a site keeps to itself: one file a layer, and the table of them."""
