"""What a language model is asked: a prompt a file, by the kind of question."""
