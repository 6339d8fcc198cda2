"""Files to documents and question pairs: what is read, and by whom."""
