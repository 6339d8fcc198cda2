"""Tests of daemon/learning/retriever/."""
