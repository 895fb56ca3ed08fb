.PHONY: run test check bench chaos soak env lock clean

run test check bench chaos soak env lock clean:
	@python3 dev.py $@ $(if $(filter run,$@),$(BACKEND:%=--backend %)) $(ARGS)
