"""One module an API: its header says what it does, in which versions, and what is not implemented."""
