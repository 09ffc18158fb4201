// offline.cpp: the engine by files: a bundle of questions in, a file of answers out (docs/offline.md).
#include <iostream>

#include "engine.hpp"
#include "session.hpp"

namespace {

class Sheet { // the answers of one case
public:
    Sheet(Reader &in, Writer &out, const std::string &name, std::shared_ptr<const Model> model)
        : in_(in), out_(out), asked_("input/" + name + "/"), answered_("answer/" + name + "/"),
          session_(std::move(model), in.integer(asked_ + "max_len"))
    {
        if (in_.has(asked_ + "root")) session_.set_root(in_.integer(asked_ + "root"));
    }

    void play()
    {
        std::string point;
        try {
            for (int i = 0; in_.has(asked_ + (point = say("chunk", i)) + "/tokens"); i++) {
                session_.prefill(in_.integers(asked_ + point + "/tokens"), trace(point));
                look(point);
            }
            for (int i = 0; in_.has(asked_ + (point = say("round", i)) + "/tokens"); i++) round(point);
        } catch (const std::exception &broken) { // the case ends here, the others go on
            out_.add_bytes(answered_ + point + "/error", broken.what());
        }
    }

private:
    // The tree is rooted in what the truth decided: after another decision of ours it is refused
    // here, and the case ends. The judge has by then what it needs.
    void round(const std::string &point)
    {
        const std::string at = asked_ + point + "/";
        const Tree tree{in_.integers(at + "tokens"), in_.integers(at + "parents")};
        Limit limit;
        if (in_.has(at + "stop_tokens")) {
            const Ids stops = in_.integers(at + "stop_tokens");
            limit.stop_tokens.insert(stops.begin(), stops.end());
        }
        if (in_.has(at + "max_emitted")) limit.max_emitted = in_.integer(at + "max_emitted");
        if (in_.has(at + "draft_logits")) {
            const Tree built = session_.build(in_.get(at + "draft_logits"), in_.integer(at + "budget"));
            add(point, "build_tokens", built.tokens);
            add(point, "build_parents", built.parents);
        }
        session_.round(tree, limit, trace(point)); // its stages hold path, bonus, emitted and logits
        look(point);
    }

    void look(const std::string &point)
    {
        const std::string at = answered_ + point + "/";
        out_.add(at + "committed_len", {}, Ids{session_.committed_len()});
        out_.add(at + "root", {}, Ids{*session_.root()});
        session_.snapshot(out_, at + "cache_");
    }

    void add(const std::string &point, const std::string &stage, const Ids &values)
    {
        out_.add(answered_ + point + "/" + stage, {values.size()}, values);
    }

    Trace trace(const std::string &point)
    {
        return {&out_, [at = answered_ + point + "/"](const std::string &stage, int layer) {
                    return layer < 0 ? at + stage : say(at, "layer", layer, "/", stage);
                }};
    }

    Reader &in_;
    Writer &out_;
    std::string asked_, answered_;
    Session session_;
};

} // namespace

int answer(const std::string &questions, const std::string &result)
{
    try {
        Reader in(questions, "BundleError");
        const auto model = std::make_shared<const Model>(load_model(in));
        Writer out;
        const Tensor id = in.get("questions/id"); // says which questions these are answers to
        out.add_bytes("questions/id", std::string(static_cast<const char *>(id.raw.data), id.size()));
        const std::string input = "input/", last = "/max_len"; // each case has one
        for (const std::string &name : in.names(input)) {
            const std::size_t end = name.size() - std::min(name.size(), last.size());
            if (name.compare(end, last.size(), last) != 0) continue;
            Sheet(in, out, name.substr(input.size(), end - input.size()), model).play();
        }
        json::Object metadata;
        metadata["kind"] = json::text("answers");
        metadata["engine"] = json::Value(engine_info());
        out.write(result, json::dump(json::Value(metadata)));
        return 0;
    } catch (const std::exception &broken) {
        std::cerr << "cpp-engine: " << broken.what() << '\n';
        return 1;
    }
}
