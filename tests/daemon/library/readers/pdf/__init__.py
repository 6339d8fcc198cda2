"""Engines that read PDF files' pictures."""
