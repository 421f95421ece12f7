"""What client and service of a wire protocol share."""
