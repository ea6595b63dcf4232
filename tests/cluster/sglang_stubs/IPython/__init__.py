"""SGLang imports what it shows notebooks with; nothing of it is called here."""
