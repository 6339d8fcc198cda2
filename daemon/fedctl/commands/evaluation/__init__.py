"""How good a site finds and answers: by its own pairs, and by people."""
