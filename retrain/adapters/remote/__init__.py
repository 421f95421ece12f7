"""What the backends share whose service is reached over HTTP; each speaks its own protocol."""
