"""The store on 3FS."""
