"""The parameter server: generators that yield effects."""
