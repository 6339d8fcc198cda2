"""Tests of daemon/answering/prompts/."""
