"""What the guards of other people's loops (Lightning, Hugging Face) are made of."""
