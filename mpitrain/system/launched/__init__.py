"""What a launcher says, and what a rank and its launch tell one another."""
