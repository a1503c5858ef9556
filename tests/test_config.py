from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplegraph.base.config import AttentionCGSupport, CudaGraphConfig, CudaGraphMode
from simplegraph.base.errors import ConfigError, SimpleGraphError

BUSY = CudaGraphConfig(
    mode="FULL_AND_PIECEWISE",
    capture_sizes=[4, 1, 2],
    max_num_seqs=4,
    batch_dims={"positions": 1, "mask": None, "cache": "reference"},
    pad_values={"positions": 0, "slots": -1, "mask": "keep", "ids": "repeat-last"},
)


class TestMode:
    @pytest.mark.parametrize(
        ("mode", "decode", "mixed", "separate", "full"),
        [
            ("NONE", "NONE", "NONE", False, False),
            ("PIECEWISE", "PIECEWISE", "PIECEWISE", False, False),
            ("FULL", "FULL", "FULL", False, True),
            ("FULL_DECODE_ONLY", "FULL", "NONE", True, True),
            ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE", True, True),
        ],
    )
    def test_table(self, mode, decode, mixed, separate, full):
        mode = CudaGraphMode[mode]
        assert mode.decode_mode() is CudaGraphMode[decode]
        assert mode.mixed_mode() is CudaGraphMode[mixed]
        assert mode.separate_routine() is separate
        assert mode.has_full() is full

    def test_parse(self):
        assert CudaGraphMode.parse("full_decode_only") is CudaGraphMode.FULL_DECODE_ONLY
        assert CudaGraphMode.parse(CudaGraphMode.FULL) is CudaGraphMode.FULL

    @pytest.mark.parametrize("value", ["fast", "", 1, ("FULL", "FULL")])
    def test_parse_names_what_exists(self, value):
        with pytest.raises(ConfigError, match="expected one of NONE, PIECEWISE, FULL, FULL_DECODE_ONLY"):
            CudaGraphMode.parse(value)

    def test_attention_support_orders(self):
        never, single, uniform, always = AttentionCGSupport
        assert never < single < uniform < always
        assert min(always, single) is single


class TestDefaults:
    def test_correct_by_default(self):
        config = CudaGraphConfig()
        assert config.mode is CudaGraphMode.FULL
        assert (config.outputs, config.capture, config.on_capture_failure) == ("clone", "lazy", "eager")
        assert (config.verify, config.padding, config.debug) == (0, True, False)

    def test_keyword_only(self):
        with pytest.raises(TypeError):
            CudaGraphConfig("FULL")


class TestNormalised:
    def test_sizes(self):
        for sizes in ([8, 1, 8, 4], (8, 4, 1), {1, 4, 8}, frozenset({1, 4, 8})):
            assert CudaGraphConfig(capture_sizes=sizes).capture_sizes == (1, 4, 8)
        assert CudaGraphConfig(capture_sizes=range(1, 4)).capture_sizes == (1, 2, 3)

    def test_mode_by_name(self):
        assert CudaGraphConfig(mode="piecewise").mode is CudaGraphMode.PIECEWISE


BAD = [
    ("mode", "fast"),
    ("mode", 3),
    ("capture_sizes", []),
    ("capture_sizes", [0]),
    ("capture_sizes", [-4, 4]),
    ("capture_sizes", [1.5]),
    ("capture_sizes", [True]),
    ("capture_sizes", "8"),
    ("capture_sizes", b"8"),
    ("capture_sizes", 8),
    ("max_num_seqs", 0),
    ("max_num_tokens", -5),
    ("uniform_query_len", 0),
    ("verify", -1),
    ("verify", True),
    ("max_signatures", 0),
    ("padding", 1),
    ("padding", "no"),
    ("debug", None),
    ("progress", 0),
    ("outputs", "copy"),
    ("capture", "eager"),
    ("on_capture_failure", "ignore"),
    ("batch_dims", ["x"]),
    ("batch_dims", {1: 0}),
    ("batch_dims", {"x": "first"}),
    ("batch_dims", {"x": 1.0}),
    ("batch_dims", {"x": True}),
    ("pad_values", None),
    ("pad_values", {"x": "nan"}),
    ("pad_values", {"x": None}),
    ("pad_values", {0: 0}),
]


class TestRefused:
    @pytest.mark.parametrize(("field", "value"), BAD)
    def test_the_error_names_field_and_value(self, field, value):
        with pytest.raises(ConfigError, match=field) as caught:
            CudaGraphConfig(**{field: value})
        assert isinstance(caught.value, SimpleGraphError)
        assert isinstance(caught.value, ValueError)

    @pytest.mark.parametrize(("field", "value"), BAD)
    def test_replace_checks_too(self, field, value):
        with pytest.raises(ConfigError):
            CudaGraphConfig().replace(**{field: value})

    def test_sizes_no_batch_can_have(self):
        with pytest.raises(ConfigError, match="largest capture size is 16, above max_num_tokens=8"):
            CudaGraphConfig(max_num_tokens=8, capture_sizes=[1, 16])

    def test_sizes_above_max_num_seqs_are_no_error(self):
        assert CudaGraphConfig(capture_sizes=[1, 16], max_num_seqs=8).capture_sizes == (1, 16)

    def test_a_request_that_fits_no_batch(self):
        with pytest.raises(ConfigError, match="uniform_query_len is 9, above max_num_tokens=8"):
            CudaGraphConfig(max_num_tokens=8, uniform_query_len=9)


class TestValue:
    def test_fields_cannot_be_set(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            BUSY.mode = CudaGraphMode.NONE

    @pytest.mark.parametrize(
        "edit",
        [
            lambda m: m.__setitem__("x", 0),
            lambda m: m.__delitem__("positions"),
            lambda m: m.update(x=0),
            lambda m: m.pop("positions"),
            lambda m: m.popitem(),
            lambda m: m.clear(),
            lambda m: m.setdefault("x", 0),
            lambda m: m.__ior__({"x": 0}),
        ],
    )
    def test_mappings_cannot_be_edited(self, edit):
        with pytest.raises(ConfigError, match=r"use config\.replace"):
            edit(BUSY.batch_dims)
        assert BUSY.batch_dims == {"positions": 1, "mask": None, "cache": "reference"}

    def test_the_callers_own_containers_are_not_kept(self):
        sizes, dims = [1, 2], {"x": 0}
        config = CudaGraphConfig(capture_sizes=sizes, batch_dims=dims)
        sizes.append(3)
        dims["y"] = 1
        assert (config.capture_sizes, dict(config.batch_dims)) == ((1, 2), {"x": 0})

    @pytest.mark.parametrize("config", [CudaGraphConfig(), BUSY])
    @pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
    def test_copies_and_pickles_are_equal_and_as_frozen(self, config, clone):
        other = clone(config)
        assert other == config
        assert hash(other) == hash(config)
        with pytest.raises(ConfigError):
            other.pad_values["x"] = 1

    def test_hash_follows_equality(self):
        assert hash(CudaGraphConfig(batch_dims={"a": 0, "b": 1})) == hash(CudaGraphConfig(batch_dims={"b": 1, "a": 0}))
        assert len({CudaGraphConfig(), CudaGraphConfig(), BUSY, CudaGraphConfig(batch_dims={"a": 1})}) == 3

    def test_repr_can_be_read_back(self):
        assert "capture_sizes=(1, 2, 4)" in repr(BUSY)


class TestReplace:
    def test_changes_one_field_and_no_other(self):
        changed = BUSY.replace(debug=True)
        assert changed.debug
        assert changed.replace(debug=False) == BUSY
        assert not BUSY.debug

    @pytest.mark.parametrize("take", [CudaGraphConfig, CudaGraphConfig().replace])
    def test_a_typo_is_told_the_setting_that_was_meant_and_lists_all(self, take):
        said = r"no such setting: capture_size \(did you mean capture_sizes\?\); the settings are mode, capture_sizes,"
        with pytest.raises(ConfigError, match=said):
            take(capture_size=[1])

    def test_a_name_like_no_setting_is_told_none(self):
        with pytest.raises(ConfigError, match="no such setting: temperature; the settings are mode, capture_sizes,"):
            CudaGraphConfig().replace(temperature=1)

    def test_several_typos_are_all_named(self):
        said = r"no such setting: debugs, output \(did you mean debug, outputs\?\)"
        with pytest.raises(ConfigError, match=said):
            CudaGraphConfig(output="static", debugs=True)


class TestEnvironment:
    @pytest.mark.parametrize(
        ("variable", "text", "field", "value"),
        [
            ("MODE", "none", "mode", CudaGraphMode.NONE),
            ("MODE", " FULL_AND_PIECEWISE ", "mode", CudaGraphMode.FULL_AND_PIECEWISE),
            ("CAPTURE_SIZES", "4,1, 2", "capture_sizes", (1, 2, 4)),
            ("CAPTURE_SIZES", "[4, 1, 2]", "capture_sizes", (1, 2, 4)),
            ("MAX_NUM_SEQS", "100", "max_num_seqs", 100),
            ("MAX_NUM_TOKENS", "100", "max_num_tokens", 100),
            ("UNIFORM_QUERY_LEN", "4", "uniform_query_len", 4),
            ("PADDING", "off", "padding", False),
            ("OUTPUTS", "static", "outputs", "static"),
            ("CAPTURE", "upfront", "capture", "upfront"),
            ("ON_CAPTURE_FAILURE", "raise", "on_capture_failure", "raise"),
            ("VERIFY", "3", "verify", 3),
            ("MAX_SIGNATURES", "2", "max_signatures", 2),
            ("DEBUG", "1", "debug", True),
            ("DEBUG", "True", "debug", True),
            ("DEBUG", "yes", "debug", True),
            ("DEBUG", "0", "debug", False),
            ("PROGRESS", "false", "progress", False),
        ],
    )
    def test_each_variable(self, variable, text, field, value):
        config = CudaGraphConfig().from_env({"SIMPLEGRAPH_" + variable: text})
        assert getattr(config, field) == value
        assert config == CudaGraphConfig(**{field: value})

    def test_a_variable_that_names_no_setting_is_ignored_with_a_warning(self, caplog):
        kubernetes = {
            "SIMPLEGRAPH_PORT": "tcp://10.0.0.1:80",
            "SIMPLEGRAPH_CAPTURE_SIZE": "1",
            "SIMPLEGRAPH_BATCH_DIMS": "x",
            "SIMPLEGRAPH_DEBUG": "1",
        }
        with caplog.at_level("WARNING", logger="simplegraph"):
            assert CudaGraphConfig().from_env(kubernetes) == CudaGraphConfig(debug=True)
        said = [record.getMessage() for record in caplog.records]
        assert "simplegraph: SIMPLEGRAPH_PORT names no setting, and is ignored." in said
        misspelt = (
            "SIMPLEGRAPH_CAPTURE_SIZE names no setting (did you mean SIMPLEGRAPH_CAPTURE_SIZES?), and is ignored."
        )
        assert f"simplegraph: {misspelt}" in said
        unreadable = "is ignored: batch_dims cannot be set from the environment; pass it to wrap."
        assert f"simplegraph: SIMPLEGRAPH_BATCH_DIMS {unreadable}" in said

    def test_a_mode_is_shown_as_it_is_written(self):
        assert repr(CudaGraphConfig(mode="OFF")).startswith("CudaGraphConfig(mode=CudaGraphMode.NONE, ")

    @pytest.mark.parametrize("text", ["off", "OFF", "none"])
    def test_graphs_are_switched_off_by_the_mode(self, text):
        assert CudaGraphConfig().from_env({"SIMPLEGRAPH_MODE": text}).mode is CudaGraphMode.NONE

    @pytest.mark.parametrize(
        ("variable", "text", "message"),
        [
            ("VERIFY", "many", "SIMPLEGRAPH_VERIFY='many' is not valid: expected a whole number"),
            ("VERIFY", "-1", r"verify is -1.*SIMPLEGRAPH_VERIFY"),
            ("DEBUG", "maybe", "SIMPLEGRAPH_DEBUG='maybe' is not valid: expected True or False"),
            ("DEBUG", "", "SIMPLEGRAPH_DEBUG='' is not valid"),
            ("CAPTURE_SIZES", "1;2", r"expected a list of whole numbers of at least 1, such as \[1, 2, 4\]"),
            ("CAPTURE_SIZES", "", r"expected a list of whole numbers of at least 1, such as \[1, 2, 4\]"),
            (
                "CAPTURE_SIZES",
                "0",
                r"capture_sizes is \(0,\); expected a list of whole numbers.*SIMPLEGRAPH_CAPTURE_SIZES",
            ),
            ("MODE", "fast", r"mode is 'fast'; expected one of .*SIMPLEGRAPH_MODE"),
            ("OUTPUTS", "copy", r"outputs is 'copy'.*SIMPLEGRAPH_OUTPUTS"),
        ],
    )
    def test_a_bad_variable_is_named(self, variable, text, message):
        with pytest.raises(ConfigError, match=message):
            CudaGraphConfig().from_env({"SIMPLEGRAPH_" + variable: text})

    def test_the_environment_wins_over_the_code(self):
        config = BUSY.from_env({"SIMPLEGRAPH_MODE": "NONE", "SIMPLEGRAPH_CAPTURE_SIZES": "8", "PATH": "/bin"})
        assert config.mode is CudaGraphMode.NONE
        assert config.capture_sizes == (8,)
        assert config.batch_dims == BUSY.batch_dims

    def test_nothing_set_changes_nothing(self):
        assert BUSY.from_env({"HOME": "/root", "simplegraph_mode": "none"}) is BUSY

    def test_reads_the_process_environment(self, monkeypatch):
        monkeypatch.setenv("SIMPLEGRAPH_DEBUG", "1")
        assert CudaGraphConfig().from_env().debug

    def test_conflicting_variables(self):
        with pytest.raises(ConfigError, match=r"max_num_tokens=4.*SIMPLEGRAPH_CAPTURE_SIZES, SIMPLEGRAPH_MAX_NUM"):
            CudaGraphConfig().from_env({"SIMPLEGRAPH_CAPTURE_SIZES": "8", "SIMPLEGRAPH_MAX_NUM_TOKENS": "4"})


@given(
    sizes=st.none() | st.lists(st.integers(1, 1000), min_size=1),
    mode=st.sampled_from(CudaGraphMode),
    dims=st.dictionaries(st.text(max_size=5), st.none() | st.integers(-3, 3) | st.just("reference"), max_size=3),
)
def test_round_trip_is_the_identity(sizes, mode, dims):
    config = CudaGraphConfig(capture_sizes=sizes, mode=mode, batch_dims=dims)
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.replace() == config
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert CudaGraphConfig(**values) == config
