"""Small random models of one round: what each rule of the protocol is for."""
