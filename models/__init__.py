"""The front end: opens a model, its checkpoint and tokenizer, and captures it into the IR (torch lives here only)."""
