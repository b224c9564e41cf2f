"""Training a drafter for a frozen target."""
