"""Real `fedd` processes over real TLS on loopback, and who starts them."""
